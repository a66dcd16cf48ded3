"""Puts the fake CUDA device into every Python process whose path begins with this folder."""

import fake_cuda

fake_cuda.install_with_torch()
