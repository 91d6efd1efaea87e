"""quantkit: quantize a BF16 GGUF under a frozen protocol and measure what each tier keeps."""

__version__ = "0.1.0"
