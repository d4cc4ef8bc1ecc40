"""Responses that continue without their client and can be read again."""
