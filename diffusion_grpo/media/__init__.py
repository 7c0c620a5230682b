"""Read, write and convert images, videos and sound."""
