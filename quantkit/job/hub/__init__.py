"""The hub: a run's bundle published to it and fetched from it, and the headers of the models that lie there."""
