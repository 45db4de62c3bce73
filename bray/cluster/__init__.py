"""Where components run: in this process or in processes of a Ray cluster. Nothing else in the package knows Ray."""
