"""Everything that knows a second process or a device: launch, ranks, meshes, collectives, random streams."""
