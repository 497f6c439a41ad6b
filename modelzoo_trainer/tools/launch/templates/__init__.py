"""The templates of job files, which `launch.render` fills."""
