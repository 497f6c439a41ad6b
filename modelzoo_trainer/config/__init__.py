"""YAML files to checked plans to trainers; `load_plans` is the way in, `cli.py` its user.

loader -> legacy -> changes, overrides -> build (sections, components, arguments, names) -> plan
A plan is printed (`report`) or built; `json_schema` says what a file may hold.
"""
