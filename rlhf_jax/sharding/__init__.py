"""The only place that knows devices and processes."""
