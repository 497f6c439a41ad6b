"""A run on paper: what each of many processes would hold, compute and send, without a device."""
