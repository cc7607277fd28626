"""Program: what each rank of a training step does and holds, as blocks of operators; time and memory follow from it."""
