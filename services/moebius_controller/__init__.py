"""The health controller: decides, from what it observes, what to do about workers that are not well."""
