"""What is generated from the declared fields: `/openapi.json` and the tables of fields."""
