"""URLs of the home page and the search."""

from django.urls import path

from webapp.home import views

urlpatterns = [
    path("", views.home, name="home"),
    path("search/", views.search, name="search"),
]
