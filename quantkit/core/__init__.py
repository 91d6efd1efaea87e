"""Floor 0: errors, files, units, statistics. Imports nothing of the project above it."""
