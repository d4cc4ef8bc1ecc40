"""What a sequence's grammar and reasoning allow next."""
