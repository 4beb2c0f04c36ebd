"""Moving and finding KV blocks: hand-off state machine, transports, Redis directory."""
