"""Task graphs: the order that needs least memory on one processor, and schedules for many under a memory bound."""
