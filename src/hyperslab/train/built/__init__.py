"""From a recipe to its network and its objective, whoever has written them."""
