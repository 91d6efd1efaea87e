"""Floor 2: pure array mathematics. Knows no files and no models."""
