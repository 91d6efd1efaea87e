"""Floor 1: what is to be done, as data: protocol, plan, tensor types, the header of a GGUF, result records."""
