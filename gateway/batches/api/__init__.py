"""Batches in OpenAI's API, and the record that both APIs share."""
