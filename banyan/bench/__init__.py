"""Benchmarks that drive a running server over HTTP: workloads, client, tables, JSON, picture."""
