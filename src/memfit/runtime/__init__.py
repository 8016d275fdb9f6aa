"""A plan as a module that trains: the model given back, its steps under autograd, and the loop that compares measured with planned bytes."""
