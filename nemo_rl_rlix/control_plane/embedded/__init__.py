"""The scheduler that comes with the package: a pure planner and the actor around it."""
