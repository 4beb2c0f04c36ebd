"""The front door: HTTP and gRPC in, admission, choice of nodes, failover."""
