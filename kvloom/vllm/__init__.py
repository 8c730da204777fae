"""The plug-in: the only package of kvloom that imports vllm."""
