"""A client of other servers with OpenAI's API, to which a fallback chain may lead."""
