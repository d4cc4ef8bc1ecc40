"""The models of the server: one engine each, their names, and what all of them share."""
