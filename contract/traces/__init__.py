"""OpenTelemetry traces: contexts that travel with messages, and spans that are exported.

Without `WARMQ_TRACES` nothing of this runs, and OpenTelemetry's SDK is not imported.
"""
