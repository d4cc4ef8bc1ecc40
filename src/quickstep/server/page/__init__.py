"""The page at `/`: talk to the model, and see where the time of each request went."""
