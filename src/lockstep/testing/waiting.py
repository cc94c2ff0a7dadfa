"""Waiting for something that another thread or process does, in a test."""

from lockstep.comm.waiting import wait_until as wait_until
