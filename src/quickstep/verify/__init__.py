"""The exactness checker: same request, same bits."""
