"""The gateway's own OpenAPI document: what each route takes and answers, from the types it uses."""
