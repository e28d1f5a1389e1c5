"""Makes the gateway's OpenAPI document from its operations and their types."""
