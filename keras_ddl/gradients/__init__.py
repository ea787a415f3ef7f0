"""Sums gradients over ranks, for the Strategy and for the front ends of Horovod and IBM's DDL."""
