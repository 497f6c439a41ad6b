"""Look at checkpoints: tables, differences, and checkpoints in object stores."""
