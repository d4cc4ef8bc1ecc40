"""What is known of each request field, and the documents made of it."""
