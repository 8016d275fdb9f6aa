"""A captured step on a device -> Costs: measured where the device is here, by a roofline model where it is not."""
