"""Generation for reinforcement learning: new weights of a model that is trained, and rollouts as trainers take them."""
