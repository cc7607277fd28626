"""A setup as a program: the blocks of Llama- and GPT-like models."""
