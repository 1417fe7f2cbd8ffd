"""Programs of several processes, started together: arrangements of ours, and the engines that start them."""
