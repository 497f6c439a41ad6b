"""Models, their data and weights, and callbacks for them."""
