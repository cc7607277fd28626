"""Program: what each rank of a step runs, holds and communicates, without times."""
