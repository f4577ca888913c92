"""CPU operators in C++, compiled once by the system's compiler and cached."""
