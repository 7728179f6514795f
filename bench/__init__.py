"""Side-by-side measurements of Phalanx and of what people use today, on processes of one thread and gloo."""
