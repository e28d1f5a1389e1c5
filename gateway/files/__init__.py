"""OpenAI's Files and Uploads APIs."""
