"""Floor 4: resumable steps over a run directory."""
