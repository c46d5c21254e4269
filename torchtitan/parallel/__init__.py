"""From one device to many: mesh, process groups, and the ordered list that distributes a model."""
