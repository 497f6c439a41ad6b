"""Read YAML files, check them and build trainers; the entry point is `build.load_plans`.

loader -> legacy -> overrides -> build (sections, components, arguments, names) -> plan
A plan is printed (`report`) or built; `json_schema` describes the format for editors.
"""
