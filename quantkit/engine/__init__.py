"""Floor 3: the only code that touches llama.cpp, in worker processes. Knows no statistics."""
