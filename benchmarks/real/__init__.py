"""Two real public models: their files, what they are asked, and llama.cpp on the same files."""
