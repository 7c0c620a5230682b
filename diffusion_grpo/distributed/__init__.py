"""Several processes: DDP, DeepSpeed ZeRO, FSDP2, context parallelism, and how processes fail together."""
