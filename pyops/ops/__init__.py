"""Public functions over the ops; importing a module registers its ops with torch."""
