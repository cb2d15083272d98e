"""Object stores: S3, GCS, Azure and one in memory, by way of `obstore`, which only this room knows."""
