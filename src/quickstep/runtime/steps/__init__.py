"""How the rows of a step run: captured on a CPU, as graphs on a GPU, or op by op."""
